"""POST /tokenize, POST /detokenize and GET /version, as vLLM has them."""

from importlib.metadata import version
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Discriminator, Field, Tag

from contract.model_cards import ModelCard
from gateway.http.errors import invalid_value
from gateway.http.handlers import answers
from gateway.models.tokens import ModelTokenizer
from gateway.prepare.admission import AnyCaller, Inference
from gateway.prepare.calls import unknown_model_error
from gateway.prepare.generation import check_ids, prompts_of
from gateway.prepare.schemas import MAX_TOKEN_IDS, ChatBody, CompletionBody, TokenIds
from gateway.prepare.unsupported import OwnModel
from gateway.routes.requests import GuardedRoute
from gateway.state import Gateway, ThisGateway

_ANSWERS = answers(401, 403, 404, 415, 429)
router = APIRouter(route_class=GuardedRoute, tags=["tokens"], responses=_ANSWERS)


class TokenizedChat(ChatBody):
    model: str = Field("", max_length=256)
    return_token_strs: bool | None = None


class TokenizedPrompt(CompletionBody):
    model: str = Field("", max_length=256)
    return_token_strs: bool | None = None


# POST /tokenize: the body of a call, or what of it makes the prompt.
TokenizeBody = Annotated[
    Annotated[TokenizedChat, Tag("chat")] | Annotated[TokenizedPrompt, Tag("completion")],
    Discriminator(lambda body: "chat" if "messages" in body else "completion"),
]


class DetokenizeBody(OwnModel):
    """POST /detokenize."""

    model: str = Field("", max_length=256)
    tokens: TokenIds


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


@router.post("/tokenize")
async def tokenize(caller: Inference, gateway: ThisGateway, body: TokenizeBody) -> Tokens:
    """The tokens of a prompt, or of a chat as the model would be given it, of any length."""
    caller.check_template(body)
    card, tokenizer = await _model(gateway, body.model, caller.tenant)
    (ids, *others), _ = await prompts_of(tokenizer, card, body, most=MAX_TOKEN_IDS)
    if others:
        raise invalid_value("prompt", "prompt: one at a time")
    names = tokenizer.names_of(ids) if body.return_token_strs else None
    context = card.context_length
    return Tokens(count=len(ids), max_model_len=context, tokens=list(ids), token_strs=names)


@router.post("/detokenize")
async def detokenize(
    caller: Inference, gateway: ThisGateway, body: DetokenizeBody
) -> dict[Literal["prompt"], str]:
    """The text of tokens, with that of special ones."""
    card, tokenizer = await _model(gateway, body.model, caller.tenant)
    check_ids("tokens", tuple(body.tokens), card)
    return {"prompt": tokenizer.decode(body.tokens)}


@router.get("/version")
async def get_version(_: AnyCaller) -> dict[Literal["version"], str]:
    """The version of batchway."""
    return {"version": version("batchway")}


async def _model(gateway: Gateway, name: str, tenant: str) -> tuple[ModelCard, ModelTokenizer]:
    """A model, the only one if none is named. Raises BatchwayError."""
    known = gateway.broker.known
    cards = {card.name: card for card in (await known.models()).values() if card.flow is None}
    name = await known.named(name) if name or len(cards) != 1 else next(iter(cards))
    if name not in cards:
        raise await unknown_model_error(gateway.broker, name, tenant)
    return cards[name], await known.tokenizer(cards[name])
