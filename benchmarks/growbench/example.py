"""An example of a rule: one light block where the loss gradient is largest, after a quarter of the time."""

import numpy as np


def strongest_gradient(observation, legal):
    if observation["network.progress"] < 0.25 or "planted" in observation["memory"]:
        return None
    strength = np.nan_to_num(observation["slot.boundary_norm_relative"], nan=-np.inf)
    for index in np.argsort(-strength):
        pair = (observation["slots"][index], observation["blueprints"][0])
        if pair in legal:
            observation["memory"]["planted"] = pair
            return pair
    return None
