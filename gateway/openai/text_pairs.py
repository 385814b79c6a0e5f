"""Prompts of pairs of texts: joined by the tokenizer, or in the form of a chat template."""

from collections.abc import Mapping, Sequence

from gateway.openai.admission import Prompts, tokenised
from gateway.openai.template_process import TemplateProcess
from gateway.openai.tokens import Cut, ModelTokenizer, NoRoom
from gateway.openai.truncation import no_room

Pairs = Sequence[tuple[str, str]]
_MAX_ROUNDS = 4  # of shortening texts, whose tokens change with what stands beside them


def joined_pairs(
    tokenizer: ModelTokenizer, names: Sequence[str], instruction: str, pairs: Pairs, cut: Cut | None
) -> tuple[Prompts, int, tuple[int, ...]]:
    """The token ids of each pair, how many were cut off, and how many of each prompt belong to the
    first text, which the instruction precedes. `names`: of pairs, in errors. Raises ApiError."""
    found = tokenizer.encode_pairs([(instruction + first, second) for first, second in pairs])
    num_cut = 0
    for number, (ids, _) in enumerate(found):
        if cut is None or len(ids) <= cut.max_tokens:
            continue
        try:
            found[number] = tokenizer.cut_pair(pairs[number], cut, instruction)
        except NoRoom:
            raise no_room(names[number]) from None
        num_cut += len(ids) - len(found[number][0])
    return tuple(tuple(ids) for ids, _ in found), num_cut, tuple(length for _, length in found)


async def rendered_pairs(
    tokenizer: ModelTokenizer,
    template: TemplateProcess,
    instruction: str,
    pairs: Pairs,
    cut: Cut | None,
) -> tuple[Prompts, int]:
    """The token ids of each pair in the model's own form, and how many were cut off. Only second
    texts are cut, so that the form stays whole. Raises TemplateRefused."""
    shown, num_cut = list(pairs), 0
    prompts = await _encoded(tokenizer, template, instruction, shown)
    for _ in range(_MAX_ROUNDS if cut else 0):
        assert cut is not None
        lengths = map(len, prompts)
        excess = {i: num - cut.max_tokens for i, num in enumerate(lengths) if num > cut.max_tokens}
        if not excess:
            break
        await _shorten(tokenizer, shown, excess, keeps_end=cut.keeps_end)
        again = await _encoded(tokenizer, template, instruction, [shown[i] for i in excess])
        for i, prompt in zip(excess, again, strict=True):
            num_cut += len(prompts[i]) - len(prompt)
            prompts[i] = prompt
    return tuple(prompts), num_cut


async def _shorten(
    tokenizer: ModelTokenizer,
    pairs: list[tuple[str, str]],
    excess: Mapping[int, int],
    *,
    keeps_end: bool,
) -> None:
    """Cuts off so many tokens of the second texts at these places, but for the last token."""

    def shorten() -> None:
        for i, num_tokens in excess.items():
            first, second = pairs[i]
            [ids] = tokenizer.encode_texts([second], adds_special_tokens=False)
            left = max(1, len(ids) - num_tokens)
            pairs[i] = first, tokenizer.shorten(second, left, keeps_end=keeps_end)

    await tokenised(shorten, sum(len(pairs[i][1]) for i in excess))


async def _encoded(
    tokenizer: ModelTokenizer, template: TemplateProcess, instruction: str, pairs: Pairs
) -> list[tuple[int, ...]]:
    rendered = await template.render_pairs(instruction, pairs)
    return await tokenised(
        lambda: [tuple(ids) for ids in tokenizer.encode_texts(rendered, adds_special_tokens=False)],
        sum(map(len, rendered)),
    )
