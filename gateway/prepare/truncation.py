"""How a call asks that long prompts be cut: in vLLM's words, and texts for vectors also in
Cohere's. tokens.py cuts them."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from contract.model_cards import ModelCard
from gateway.http.errors import ApiError, invalid_value
from gateway.models.tokens import Cut
from gateway.prepare.unsupported import StrictModel, refusal

WHOLE = -1  # the model's length


def _not_zero(value: Any) -> Any:
    if value == 0:
        raise refusal("must be at least 1, or -1: the model's length")
    return value


class Truncated(StrictModel):
    """Fields of all calls."""

    truncate_prompt_tokens: (
        Annotated[int, Field(ge=WHOLE, lt=2**31), AfterValidator(_not_zero)] | None
    ) = None
    truncation_side: Literal["left", "right"] | None = None  # which is cut off

    def cut(self, card: ModelCard, *, room: int, cuts_left: bool) -> Cut | None:
        """Returns how the model's prompts are cut; None if they are not. `room`: the tokens of the
        longest prompt that the model allows; `cuts_left`: the default side. Raises ApiError."""
        asked = self.truncate_prompt_tokens
        if asked is None:
            if not card.truncates:
                return None
            asked = WHOLE
        if asked > card.context_length:
            name = "truncate_prompt_tokens"
            raise invalid_value(name, f"{name} may be at most {card.context_length} here")
        side = self.truncation_side
        return Cut(room if asked == WHOLE else asked, cuts_left if side is None else side == "left")


class TruncatedTexts(Truncated):
    """Fields of calls for vectors."""

    # Cohere's; true and false as in other servers.
    truncate: Literal["NONE", "START", "END"] | bool | None = None

    @model_validator(mode="after")
    def _is_one_wish(self) -> Self:
        if self.truncate is not None and self.truncation_side is not None:
            raise refusal("cannot be combined with truncate", "truncation_side")
        if self.truncate in ("NONE", False) and self.truncate_prompt_tokens is not None:
            raise refusal("cannot be combined with truncate_prompt_tokens", "truncate")
        return self

    def cut_texts(self, card: ModelCard) -> Cut | None:
        """Returns how texts are cut; None if they are not. Raises ApiError."""
        if self.truncate in ("NONE", False):
            return None
        cut = self.cut(card, room=card.context_length, cuts_left=self.truncate == "START")
        if cut is None and self.truncate is not None:
            return Cut(card.context_length, self.truncate == "START")
        return cut


def no_room(param: str) -> ApiError:
    """The error for a text of which nothing would be left."""
    message = f"{param}: nothing would be left of it: allow more tokens"
    return invalid_value(param, message)
