"""Several documents in one row without one of them seeing another: exact packed training for attention and for the gated delta net.

Attention needs nothing: without an attention mask its mask follows position_ids. For the gated delta net transformers refuses packed rows unless flash-linear-attention *and* causal-conv1d are installed; the second has no wheel. Here the
convolution is our own (shifted products, masked at document borders) and the rule runs either in flash-linear-attention, on a GPU, or
document by document in plain torch. `check` then proves on the loaded model that packed equals alone, because position_ids do not
reset the state and a leak changes the loss by less than a thousandth.

Shape letters: B batch, C channels, T tokens, K taps.
"""

from __future__ import annotations

import importlib
import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from training.contract.families import FAMILIES

_TOLERANCE = {
    torch.float32: 1e-4,
    torch.bfloat16: 2e-2,
}  # norm of the difference over norm of the logits; a leak makes 5e-2 and more
_LENGTHS = ((3, 21), (1, 30), (17, 9), (6, 12))


class PackingError(RuntimeError):
    """Packed rows would not train as the documents alone would."""


def install() -> None:
    """Teach the model code of every family with a gated delta net packed rows, and the rule's kernels the configurations that are shipped for this card.
    Installing twice changes nothing."""
    if torch.cuda.is_available() and has_fast_rule():
        from training.lean.tuning import use_shipped  # a program too, which a package that imports it would run twice

        # Before whoever computes the rule first, ours or transformers' own layers: what is read later comes too late for it.
        use_shipped()
    for family in FAMILIES.values():
        if family.packing == "gated_delta_net":
            _install_in(importlib.import_module(family.modeling))


def _install_in(modeling: Any) -> None:
    if hasattr(modeling, "livery_packing"):
        return
    rule, conv = modeling.torch_chunk_gated_delta_rule, modeling.causal_conv1d_fn
    plain_rule = getattr(rule, "__wrapped__", rule)

    def packed_rule(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        ends = options.get("cu_seqlens")
        if query.is_cuda and (ends is None or has_fast_rule()):
            return rule(query, key, value, **options)
        if ends is None:
            # Where the fast rule is installed, transformers' own function would take it on a CPU, too.
            return plain_rule(query, key, value, **options)
        return _document_by_document(plain_rule, query, key, value, options)

    def packed_conv(
        x_BCT: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **options: Any
    ) -> Tensor:
        if options.get("seq_idx") is None:
            return conv(x_BCT, weight, bias, activation=activation, **options)
        return masked_conv(x_BCT, weight, bias, activation, options["seq_idx"])

    modeling.torch_chunk_gated_delta_rule, modeling.causal_conv1d_fn = packed_rule, packed_conv
    modeling.livery_packing = True


def has_fast_rule() -> bool:
    """Whether flash-linear-attention's kernel is really there: its package imports without Triton, and then holds only a fallback."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return False
    return callable(chunk_gated_delta_rule)


def masked_conv(
    x_BCT: Tensor, weight_CK: Tensor, bias_C: Tensor | None, activation: str | None, document_BT: Tensor
) -> Tensor:
    """Causal depthwise convolution whose taps stop at the border of their document. `document_BT` numbers the documents of a row."""
    from transformers.activations import ACT2FN

    K, T = weight_CK.shape[-1], x_BCT.shape[-1]
    x = x_BCT.to(weight_CK.dtype)
    out = x * weight_CK[:, K - 1, None]
    for back in range(1, K):
        earlier = nn.functional.pad(x, (back, 0))[..., :T]
        same = nn.functional.pad(document_BT, (back, 0), value=-1)[..., :T] == document_BT
        out = out + earlier * same[:, None, :].to(x.dtype) * weight_CK[:, K - 1 - back, None]
    if bias_C is not None:
        out = out + bias_C[:, None]
    return (ACT2FN[activation](out) if activation else out).to(x_BCT.dtype)


def check(model: nn.Module) -> float:
    """The same document behind another one in a row and before it, where nothing can leak into it; returns the relative difference of its
    logits, over four pairs of short documents.

    Both rows have the same length and go through the same kernels. Held against the document alone, bfloat16 sends some tokens to other
    experts, which looks like a leak (7e-2 of the largest logit on a healthy model). PackingError above what the model's dtype explains.
    """
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    was_training = model.training
    model.eval()
    squared, scale = 0.0, 0.0
    with torch.no_grad():
        for lengths in _LENGTHS:
            first, second = (torch.randint(0, vocabulary, (1, n), generator=generator).to(device) for n in lengths)
            behind = model(**packed_inputs([first, second]), use_cache=False).logits[0, first.shape[1] :].double()
            before = model(**packed_inputs([second, first]), use_cache=False).logits[0, : second.shape[1]].double()
            squared += float((behind - before).square().sum())
            scale += float(before.square().sum())
    model.train(was_training)
    difference = math.sqrt(squared / scale)
    if not difference <= _TOLERANCE.get(dtype, 2e-2):
        raise PackingError(
            f"a document's logits differ by {difference:.1e} when another stands before it in the row (want at most"
            f" {_TOLERANCE.get(dtype, 2e-2):.0e}); on a GPU a gated delta net needs flash-linear-attention; or write `allow: [unpacked]` in the recipe"
        )
    return difference


def packed_inputs(documents: list[Tensor]) -> dict[str, Any]:
    """Keyword arguments of a packed forward for documents [1, T]. No attention_mask: with one, the borders are ignored."""
    lengths = torch.tensor([document.shape[1] for document in documents], device=documents[0].device)
    ends = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(lengths.max())
    return {
        "input_ids": torch.cat(documents, 1),
        "position_ids": torch.cat([torch.arange(n, device=lengths.device) for n in lengths.tolist()])[None],
        "seq_idx": torch.repeat_interleave(torch.arange(len(documents), device=lengths.device), lengths)[None].to(
            torch.int32
        ),
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _document_by_document(
    rule: Any, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    if query.shape[0] != 1 or options.get("initial_state") is not None or options.get("output_final_state"):
        raise PackingError("packed rows come one at a time and without a cache; want batch 1 and use_cache=False")
    ends = options["cu_seqlens"].tolist()
    g, beta = options["g"], options["beta"]
    fixed = {name: options[name] for name in ("chunk_size", "use_qk_l2norm_in_kernel") if name in options}
    outputs = [
        rule(query[:, a:b], key[:, a:b], value[:, a:b], g=g[:, a:b], beta=beta[:, a:b], **fixed)[0]
        for a, b in itertools.pairwise(ends)
        if b > a
    ]
    return torch.cat(outputs, 1), None
