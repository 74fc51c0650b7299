"""ChatGLM-6B's positions and prefix-LM mask, from token ids: for bare, padded and packed rows."""

import torch

from cmexam_tune.families.chatglm.configuration import ChatGLMConfig


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
    positions, visible = _computed(config, input_ids, real, packed)
    return positions if given is None else given, visible if explicit is None else explicit


def _continued(mask: torch.Tensor | None, seen: int, length: int, device: torch.device) -> torch.Tensor | None:
    if mask is None and length == 1:
        return None
    visible = torch.ones(length, seen + length, dtype=torch.bool, device=device).tril(seen)[None, None]
    return visible if mask is None else visible & mask.bool()[:, None, None, :]


def _computed(
    config: ChatGLMConfig, ids: torch.Tensor, real: torch.Tensor, packed: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and mask of whole rows.

    Channel 0 counts the context (all before sop) and then stays at the mask token's place; channel 1 is 0 in the
    context and counts from 1 at sop. The context is visible to all of its question, the rest is causal.
    """
    length = ids.shape[1]
    index = torch.arange(length, device=ids.device)
    if packed is None:
        segment = torch.zeros_like(ids)
        relative = (index - real.int().argmax(1, keepdim=True)).clamp(min=0)
    else:
        packed = packed.expand_as(ids)
        segment = ((packed == 0).cumsum(1) - 1).clamp(min=0)
        relative = packed

    def first(token: int | None) -> torch.Tensor:
        places = torch.where((ids == token) & real, relative, length)
        return torch.full_like(ids, length).scatter_reduce(1, segment, places, "amin").gather(1, segment)

    context_length, gmask, mask = first(config.bos_token_id), first(config.gmask_token_id), first(config.mask_token_id)
    anchor = torch.where(gmask < length, gmask, mask)
    context = relative < context_length
    if packed is None and bool((context_length == length).any()):
        raise ValueError(f"ChatGLM-6B: a row holds no <sop> (id {config.bos_token_id}), so its context has no end.")
    if bool((~context & (anchor == length)).any()):
        ids_wanted = f"[gMASK] (id {config.gmask_token_id}) nor [MASK] (id {config.mask_token_id})"
        raise ValueError(f"ChatGLM-6B: a row holds neither {ids_wanted}.")
    positions = torch.stack(
        [torch.where(context, relative, anchor), torch.where(context, 0, relative - context_length + 1)], dim=1
    )
    if not config.position_encoding_2d:
        positions = torch.stack([relative, torch.zeros_like(relative)], dim=1)
    visible = (index[:, None] >= index) | context[:, None, :]
    if packed is not None:
        visible = visible & (segment[:, :, None] == segment[:, None, :])
    # Padding sees everything, as in the original: a row that sees nothing would be NaN in some kernels.
    visible = (visible & real[:, None, :]) | ~real[:, :, None]
    return positions, visible[:, None]
