"""The rehearsal: a pretend market that speaks vast.ai's HTTP, boxes that are real SSH servers, a bucket, named faults.

Everything listens on loopback only, and everything that was started is stopped again. Nothing here is imported by the
product: it knows a base URL and an endpoint, and runs the very code that spends money.
"""

from deployments.rehearsal.client import ControlClient, Rehearsal, start
from deployments.rehearsal.faults import parse as parse_fault

__all__ = ["ControlClient", "Rehearsal", "parse_fault", "start"]
