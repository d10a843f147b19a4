"""prefect.yaml, the same catalogue for work pools; written by `python -m deployments yaml` and checked against it by a test.

A process worker that is stopped kills its flows without a word and leaves them Running: serve is the default for one machine, a container a
run (ECS) the way to more. Pools get the SIGTERM behaviour from the environment, since Prefect reads that one nowhere else.
"""

from __future__ import annotations

from typing import Any

import yaml

from deployments.catalogue import CATALOGUE, Deployment

_HEAD = "# Written by `python -m deployments yaml`. Edit deployments/catalogue.py instead.\n"


def prefect_yaml() -> str:
    """The text of deployments/prefect.yaml."""
    content: dict[str, Any] = {
        "name": "livery",
        "deployments": [_entry(deployment) for deployment in CATALOGUE if not deployment.rehearsal_only],
    }
    return _HEAD + yaml.safe_dump(content, sort_keys=False, width=160)


def _entry(deployment: Deployment) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": deployment.name,
        "entrypoint": deployment.file_entrypoint,
        "description": deployment.description,
        "tags": list(deployment.tags),
        "parameters": dict(deployment.parameters),
        "work_pool": {
            "name": "livery-reaper" if deployment.process == "reaper" else "livery",
            "job_variables": {
                "env": {
                    "PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR": "reschedule",
                    "PREFECT_LOGGING_EXTRA_LOGGERS": "tasks,flows",
                }
            },
        },
    }
    if deployment.cron:
        entry["schedules"] = [{"cron": deployment.cron, "timezone": "UTC", "slug": deployment.name}]
    return entry
