"""ChatGLM-6B's positions and prefix-LM mask, from token ids: for bare, padded and packed rows."""

import torch

from cmexam_tune.core.errors import UserError
from cmexam_tune.models.families.chatglm.configuration import ChatGLMConfig


def real_tokens(mask: torch.Tensor) -> torch.Tensor:
    """Return bool `[b, s]`, True on tokens, for a mask `[b, s]` or the original's `[b, 1, s, s]` (True = hidden)."""
    return ~mask[:, 0, -1].bool() if mask.ndim == 4 else mask.bool()


def resolve(
    config: ChatGLMConfig,
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    seen: int,
    length: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return positions `[b, 2, s]` and the mask (True = visible, `[b, 1, s, seen + s]`; None: all is visible).

    Args:
        config: names the special tokens.
        input_ids: `[b, s]`, what is fed.
        attention_mask: see `ChatGLMForCausalLM.forward`.
        position_ids: as there.
        seen: tokens in the cache.
        length: s.

    Raises:
        ValueError: positions can be neither taken nor computed.
    """
    given = position_ids if position_ids is not None and position_ids.ndim == 3 else None
    explicit = ~attention_mask.bool() if attention_mask is not None and attention_mask.ndim == 4 else None
    if seen:
        if given is None:
            raise ValueError("ChatGLM-6B: a continuation of a cache needs position_ids [b, 2, s]; generate makes them.")
        return given, _continued(attention_mask, seen, length, given.device) if explicit is None else explicit
    if given is not None and explicit is not None:
        return given, explicit
    if input_ids is None:
        raise ValueError("ChatGLM-6B: inputs_embeds need position_ids [b, 2, s] and attention_mask [b, 1, s, s].")
    packed = position_ids if given is None and attention_mask is None else None
    real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else real_tokens(attention_mask)
    rows = _Rows(config, input_ids, real, packed)
    return rows.positions() if given is None else given, rows.visible() if explicit is None else explicit


def positions(config: ChatGLMConfig, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Return positions `[b, 2, s]` of whole rows; arguments and errors as `resolve`."""
    real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else real_tokens(attention_mask)
    return _Rows(config, input_ids, real, None).positions()


def _continued(mask: torch.Tensor | None, seen: int, length: int, device: torch.device) -> torch.Tensor | None:
    if mask is None and length == 1:
        return None
    visible = torch.ones(length, seen + length, dtype=torch.bool, device=device).tril(seen)[None, None]
    return visible if mask is None else visible & mask.bool()[:, None, None, :]


class _Rows:
    """Whole rows, cut into questions and contexts.

    Channel 0 counts the context (all before sop) and then stays at the mask token's place; channel 1 is 0 in the
    context and counts from 1 at sop. The context is visible to all of its question, the rest is causal.
    """

    def __init__(
        self, config: ChatGLMConfig, ids: torch.Tensor, real: torch.Tensor, packed: torch.Tensor | None
    ) -> None:
        """Find the parts; `packed` are positions that start again at 0 with every question."""
        length = ids.shape[1]
        self.index = torch.arange(length, device=ids.device)
        self.real, self.packed, self.two_channels = real, packed is not None, config.position_encoding_2d
        if packed is None:
            self.segment = torch.zeros_like(ids)
            self.relative = (self.index - real.int().argmax(1, keepdim=True)).clamp(min=0)
        else:
            self.relative = packed.expand_as(ids)
            self.segment = ((self.relative == 0).cumsum(1) - 1).clamp(min=0)

        def first(token: int | None) -> torch.Tensor:
            places = torch.where((ids == token) & real, self.relative, length)
            found = torch.full_like(ids, length).scatter_reduce(1, self.segment, places, "amin")
            return found.gather(1, self.segment)

        self.context_length, gmask = first(config.bos_token_id), first(config.gmask_token_id)
        self.anchor = torch.where(gmask < length, gmask, first(config.mask_token_id))
        self.context = self.relative < self.context_length
        if packed is None and bool((self.context_length == length).any()):
            raise UserError(
                f"ChatGLM-6B: a row holds no <sop> (bos_token_id {config.bos_token_id} of config.json), so its context "
                "has no end. Are config.json and ice_text.model of one release?"
            )
        if bool((~self.context & (self.anchor == length)).any()):
            marks = (
                f"[gMASK] (gmask_token_id {config.gmask_token_id} of config.json) nor [MASK] ({config.mask_token_id})"
            )
            raise UserError(
                f"ChatGLM-6B: a row holds neither {marks}. Are config.json and ice_text.model of one release?"
            )

    def positions(self) -> torch.Tensor:
        """Return `[b, 2, s]`."""
        if not self.two_channels:
            return torch.stack([self.relative, torch.zeros_like(self.relative)], dim=1)
        first = torch.where(self.context, self.relative, self.anchor)
        second = torch.where(self.context, 0, self.relative - self.context_length + 1)
        return torch.stack([first, second], dim=1)

    def visible(self) -> torch.Tensor:
        """Return `[b, 1, s, s]`."""
        visible = (self.index[:, None] >= self.index) | self.context[:, None, :]
        if self.packed:
            visible = visible & (self.segment[:, :, None] == self.segment[:, None, :])
        # Padding sees everything, as in the original: a row that sees nothing would be NaN in some kernels.
        visible = (visible & self.real[:, None, :]) | ~self.real[:, :, None]
        return visible[:, None]
