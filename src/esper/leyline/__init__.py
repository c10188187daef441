"""Contracts: enums, tables, dataclasses and protocols that the packages share. Imports no other package, and no torch."""
from __future__ import annotations

from esper.leyline.actions import (
    ALPHA_CURVE_STEEPNESS,
    ALPHA_CURVE_VALUES,
    ALPHA_SPEED_EPOCHS,
    ALPHA_TARGET_VALUES,
    BLUEPRINT_ID_TO_INDEX,
    BLUEPRINT_IDS,
    BLUEPRINTS_BY_TOPOLOGY,
    HEAD_ENUMS,
    HEAD_NAMES,
    IRRELEVANT_VALUES,
    NUM_HEADS,
    OP_ADVANCE,
    OP_FOSSILIZE,
    OP_GERMINATE,
    OP_NAMES,
    OP_PRUNE,
    OP_SET_ALPHA_TARGET,
    OP_WAIT,
    RELEVANCE,
    STYLE_ALPHA_ALGORITHMS,
    STYLE_BLEND_IDS,
    STYLE_CURVES,
    TEMPO_EPOCHS,
    AlphaCurveAction,
    AlphaSpeedAction,
    AlphaTargetAction,
    BlueprintAction,
    FactoredAction,
    GerminationStyle,
    LifecycleOp,
    TempoAction,
    Topology,
    head_sizes,
)
from esper.leyline.alpha import AlphaAlgorithm, AlphaCurve, AlphaMode, Incubation
from esper.leyline.errors import (
    BlueprintError,
    EsperError,
    PopulationError,
    ShapeError,
    SlotIdError,
    StructureError,
    TransitionError,
    allowed,
    check_number,
)
from esper.leyline.lifecycle import (
    GateConfig,
    GateFailure,
    GateReason,
    GateResult,
    LifecycleKind,
    LifecycleRecord,
    OpResult,
    Pacing,
    PruneCause,
)
from esper.leyline.metrics import EVENTS, METRICS, PHASES
from esper.leyline.outcomes import EpisodeOutcome, ObjectiveConfig, objective
from esper.leyline.protocols import ActionMasks, GovernorReport, PanicReason, PolicyObservation, PolicyProtocol, PolicyStep
from esper.leyline.reports import REPORT_DTYPE, ReportArray, SeedMetrics, SeedStateReport, TrainingSignals, stack_reports
from esper.leyline.rewards import LossRewardConfig, RentConfig, RewardConfig, RewardFamily, RewardMode
from esper.leyline.rng import Purpose, stream_seed
from esper.leyline.slots import HostProtocol, InjectionSpec, SlotConfig, format_slot_id, parse_slot_id
from esper.leyline.stages import (
    BLENDED_STAGES,
    CLOCK,
    COOLDOWN_STAGES,
    LIVE_STAGES,
    STAGES,
    TRANSITIONS,
    GateLevel,
    OnEnter,
    SeedStage,
    Transition,
    legal_ops,
)
from esper.leyline.telemetry import STEP_TABLES, OutputBackend, TelemetryEvent, TelemetryEventType

__all__ = [
    "ALPHA_CURVE_STEEPNESS", "ALPHA_CURVE_VALUES", "ALPHA_SPEED_EPOCHS", "ALPHA_TARGET_VALUES", "BLENDED_STAGES",
    "BLUEPRINTS_BY_TOPOLOGY", "BLUEPRINT_IDS", "BLUEPRINT_ID_TO_INDEX", "CLOCK", "COOLDOWN_STAGES", "EVENTS", "HEAD_ENUMS",
    "HEAD_NAMES", "IRRELEVANT_VALUES", "LIVE_STAGES", "METRICS", "NUM_HEADS", "OP_ADVANCE", "OP_FOSSILIZE", "OP_GERMINATE",
    "OP_NAMES", "OP_PRUNE", "OP_SET_ALPHA_TARGET", "OP_WAIT", "PHASES", "RELEVANCE", "REPORT_DTYPE", "STAGES", "STEP_TABLES",
    "STYLE_ALPHA_ALGORITHMS", "STYLE_BLEND_IDS", "STYLE_CURVES", "TEMPO_EPOCHS", "TRANSITIONS", "ActionMasks",
    "AlphaAlgorithm", "AlphaCurve", "AlphaCurveAction", "AlphaMode", "AlphaSpeedAction", "AlphaTargetAction",
    "BlueprintAction", "BlueprintError", "EpisodeOutcome", "EsperError", "FactoredAction", "GateConfig", "GateFailure",
    "GateLevel", "GateReason", "GateResult", "GerminationStyle", "GovernorReport", "HostProtocol", "Incubation",
    "InjectionSpec", "LifecycleKind", "LifecycleOp", "LifecycleRecord", "LossRewardConfig", "ObjectiveConfig", "OnEnter",
    "OpResult", "OutputBackend", "Pacing", "PanicReason", "PolicyObservation", "PolicyProtocol", "PolicyStep",
    "PopulationError", "PruneCause", "Purpose", "RentConfig", "ReportArray", "RewardConfig", "RewardFamily", "RewardMode",
    "SeedMetrics", "SeedStage", "SeedStateReport", "ShapeError", "SlotConfig", "SlotIdError", "StructureError",
    "TelemetryEvent", "TelemetryEventType", "TempoAction", "Topology", "TrainingSignals", "Transition", "TransitionError",
    "allowed", "check_number", "format_slot_id", "head_sizes", "legal_ops", "objective", "parse_slot_id", "stack_reports",
    "stream_seed",
]
