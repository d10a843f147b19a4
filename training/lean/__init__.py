"""The decoder of a mixture-of-experts model computed with as few passes over memory as we know how, on transformers' own modules.

Parameters, names and PEFT's wrappers stay where they are: saving, loading, merging, switching adapters and generating with a cache go on as ever, and
whatever a module cannot do here it does in the form of its authors. The forward is put on each *instance*, as `training.experts` does it, so
that a library which later replaces a class does not touch it.

    found = install(model)           # found.left says what stays stock, and why
    set_recompute(model, "mixer")

handover.py (to the stock forward), linears.py (PEFT's LoRA as projections), segments.py (packed documents), attention.py, delta_net.py, blocks.py
(norms, MLP, router, sparse block), layers.py (the decoder layer and its recomputation), host_inputs.py (what that starts from), install.py,
rule_check.py (the delta rule's kernel on this card).
"""

from training.lean.install import (
    Installed,
    handed_over,
    install,
    is_ours,
    keep_inputs,
    no_mask,
    recompute_of,
    remove,
    replaced,
    set_recompute,
    takes_no_mask,
)
from training.lean.rule_check import check_rule

__all__ = [
    "Installed",
    "check_rule",
    "handed_over",
    "install",
    "is_ours",
    "keep_inputs",
    "no_mask",
    "recompute_of",
    "remove",
    "replaced",
    "set_recompute",
    "takes_no_mask",
]
