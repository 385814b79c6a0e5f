"""Prompts of pairs of texts: joined by the tokenizer, or in the form of a chat template."""

from collections.abc import Mapping, Sequence

from gateway.models.long_texts import PIECE_CHARS, Over
from gateway.models.template_process import TemplateProcess
from gateway.models.tokens import Cut, ModelTokenizer, NoRoom, TooLong
from gateway.prepare.admission import Prompts, tokenised
from gateway.prepare.truncation import no_room

Pairs = Sequence[tuple[str, str]]
_MAX_ROUNDS = 4  # of shortening texts, whose tokens change with what stands beside them


def joined_pairs(
    tokenizer: ModelTokenizer,
    names: Sequence[str],
    instruction: str,
    pairs: Pairs,
    most: int,
    cut: Cut | None,
) -> tuple[Prompts, int, tuple[int, ...]]:
    """Returns the token ids of each pair, how many were cut off, and how many of each prompt belong
    to the first text, which follows the instruction. `names`: of pairs, in errors. Raises ApiError,
    and TooLong for a pair of more than `most` tokens that is not to be cut."""
    whole = [(instruction + first, second) for first, second in pairs]
    encoded = tokenizer.encode_pairs(whole, most if cut is None else cut.max_tokens)
    prompts, firsts, num_cut = list[tuple[int, ...]](), list[int](), 0
    for number, found in enumerate(encoded):
        if isinstance(found, Over):
            if cut is None:
                raise TooLong(number, found)
            num_tokens = found.num_tokens
            if not found.is_exact:
                num_tokens = sum(tokenizer.count(text) for text in whole[number])
            try:
                found = tokenizer.cut_pair(pairs[number], cut, instruction)
            except NoRoom:
                raise no_room(names[number]) from None
            num_cut += num_tokens - len(found[0])
        prompts.append(tuple(found[0]))
        firsts.append(found[1])
    return tuple(prompts), num_cut, tuple(firsts)


async def rendered_pairs(
    tokenizer: ModelTokenizer,
    template: TemplateProcess,
    instruction: str,
    pairs: Pairs,
    most: int,
    cut: Cut | None,
) -> tuple[Prompts, int]:
    """Returns the token ids of each pair in the model's own form, and how many were cut off. Only
    second texts are cut, so that the form stays whole. Raises TemplateRefused, and TooLong for a
    pair that still has more than `most` tokens."""
    shown, num_cut = list(pairs), 0
    if cut is not None:
        limit = cut.max_tokens
        num_cut = await _shorten_long(tokenizer, shown, limit, keeps_end=cut.keeps_end)
    prompts = await _encoded(tokenizer, template, instruction, shown, most if cut is None else None)
    for _ in range(_MAX_ROUNDS if cut else 0):
        assert cut is not None
        lengths = map(len, prompts)
        excess = {i: num - cut.max_tokens for i, num in enumerate(lengths) if num > cut.max_tokens}
        if not excess:
            break
        await _shorten(tokenizer, shown, excess, keeps_end=cut.keeps_end)
        parts = [shown[i] for i in excess]
        again = await _encoded(tokenizer, template, instruction, parts, None)
        for i, prompt in zip(excess, again, strict=True):
            num_cut += len(prompts[i]) - len(prompt)
            prompts[i] = prompt
    for number, prompt in enumerate(prompts):
        if len(prompt) > most:
            raise TooLong(number, Over(len(prompt)))
    return tuple(prompts), num_cut


async def _shorten_long(
    tokenizer: ModelTokenizer, pairs: list[tuple[str, str]], most: int, *, keeps_end: bool
) -> int:
    """Cuts long second texts to `most` tokens. Returns about how many were cut off. Raises TooLong
    if a first text alone has more."""
    is_long = [any(len(text) > PIECE_CHARS for text in pair) for pair in pairs]

    def shorten() -> int:
        num_cut = 0
        for number in (i for i, each in enumerate(is_long) if each):
            first, second = pairs[number]
            [whole, *_] = tokenizer.encode_each([first], most, adds_special_tokens=False)
            if isinstance(whole, Over):
                raise TooLong(number, whole)
            found = tokenizer.shorten(second, most, keeps_end=keeps_end)
            if len(found) < len(second):
                num_cut += tokenizer.count(second) - tokenizer.count(found)
                pairs[number] = first, found
        return num_cut

    num_chars = sum(sum(map(len, pair)) for pair, each in zip(pairs, is_long, strict=True) if each)
    return await tokenised(shorten, num_chars)


async def _shorten(
    tokenizer: ModelTokenizer,
    pairs: list[tuple[str, str]],
    excess: Mapping[int, int],
    *,
    keeps_end: bool,
) -> None:
    """Cuts tokens off second texts, but for the last one. `excess`: their number by index."""

    def shorten() -> None:
        for i, num_tokens in excess.items():
            first, second = pairs[i]
            left = max(1, tokenizer.count(second) - num_tokens)
            pairs[i] = first, tokenizer.shorten(second, left, keeps_end=keeps_end)

    await tokenised(shorten, sum(len(pairs[i][1]) for i in excess))


async def _encoded(
    tokenizer: ModelTokenizer,
    template: TemplateProcess,
    instruction: str,
    pairs: Pairs,
    most: int | None,
) -> list[tuple[int, ...]]:
    """Raises TooLong."""
    rendered = await template.render_pairs(instruction, pairs)

    def encoded() -> list[tuple[int, ...]]:
        prompts = list[tuple[int, ...]]()
        for ids in tokenizer.encode_each(rendered, most, adds_special_tokens=False):
            if isinstance(ids, Over):
                raise TooLong(len(prompts), ids)
            prompts.append(tuple(ids))
        return prompts

    return await tokenised(encoded, sum(map(len, rendered)))
