"""The metabolism: a governor that undoes disasters, the model factory, device validation."""
