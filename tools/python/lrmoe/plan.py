"""What a layer tells about its last invocation."""

from typing import Dict, NamedTuple

PHASES = ("plan", "weights", "dispatch", "compute", "return", "score", "select", "pack", "gradients", "total", "cpu")


class Imbalance(NamedTuple):
    """Rows of the most loaded rank over the mean."""
    before: float    # experts at their owners only
    forward: float   # as planned, with replicas
    backward: float  # as planned, kept rows only


class Plan(NamedTuple):
    """The plan of an invocation and what this rank measured executing it. Rows are (token, expert) pairs."""
    step: int
    layer: int
    micro_batch: int
    policy: str
    retention_rate: float
    imbalance: Imbalance
    kept_rows: int     # planned, over all ranks
    routed_rows: int   # over all ranks
    new_replicas: int
    plan_us: float
    forward_ms: Dict[str, float]   # by phase, see PHASES
    backward_ms: Dict[str, float]  # all zero before the backward pass
    rank_routed_rows: int    # of this rank's tokens
    rank_kept_rows: int      # of those
    rank_forward_rows: int   # executed here
    rank_backward_rows: int
    peak_bytes: int          # measured on this rank, this layer
    predicted_bytes: int     # the memory model's figure for the same
    kept_score: float        # LRM score mass of this rank's kept pairs
    total_score: float       # and of all its pairs


def _phases(times):
    return {phase: getattr(times, phase) for phase in PHASES}


def plan_from_summary(invocation, summary):
    """The Plan of an InvocationSummary message."""
    report, imbalance = summary.report, summary.imbalance
    return Plan(
        step=invocation.step, layer=invocation.layer, micro_batch=invocation.micro_batch, policy=summary.policy,
        retention_rate=summary.retention_rate,
        imbalance=Imbalance(imbalance.before, imbalance.forward, imbalance.backward),
        kept_rows=summary.planned_kept_rows, routed_rows=summary.planned_routed_rows,
        new_replicas=summary.new_replicas, plan_us=summary.plan_us,
        forward_ms=_phases(report.forward_ms), backward_ms=_phases(report.backward_ms),
        rank_routed_rows=report.routed_rows, rank_kept_rows=report.kept_rows,
        rank_forward_rows=report.forward_rows, rank_backward_rows=report.backward_rows,
        peak_bytes=report.peak_bytes, predicted_bytes=report.predicted_bytes,
        kept_score=report.kept_score, total_score=report.total_score)
