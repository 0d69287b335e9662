"""Async scheduling: whether a step is launched before the tokens of the one before it are read."""

from __future__ import annotations

import logging

from allotrope.config import EngineConfig

log = logging.getLogger("allotrope.engine")


def uses_async_scheduling(config: EngineConfig, device_type: str, *, observed: bool) -> bool:
    """Whether steps are scheduled asynchronously; the log has every reason against it.

    `device_type`: such as "cuda". `observed`: an observer sees every token.
    """
    reasons = []
    if config.async_scheduling == "off":
        reasons.append("--async-scheduling off was asked for")
    if config.async_scheduling == "auto" and device_type != "cuda":
        reasons.append(f"device={device_type} (auto schedules the steps of a GPU asynchronously)")
    if config.speculation is not None and config.speculation.drafts_from_text:
        reasons.append("drafts are looked up in the tokens of the step before")
    if config.pipeline_parallel_size > 1:
        reasons.append("the steps in flight of several pipeline stages are of other sequences")
    if observed:
        reasons.append("an observer may replace tokens")
    if reasons:
        log.info("async scheduling is off: %s", "; ".join(reasons))
    else:
        log.info("async scheduling is on: each step is launched before the tokens of the one before it are read")
    return not reasons
