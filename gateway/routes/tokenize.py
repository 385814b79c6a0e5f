"""POST /tokenize, POST /detokenize and GET /version, as vLLM has them."""

from importlib.metadata import version

from fastapi import APIRouter
from pydantic import BaseModel

from contract.model_cards import ModelCard
from gateway.http.errors import invalid_value
from gateway.http.handlers import answers
from gateway.models.tokens import ModelTokenizer
from gateway.prepare.admission import AnyCaller, Inference
from gateway.prepare.calls import unknown_model_error
from gateway.prepare.generation import check_ids, prompts_of
from gateway.prepare.schemas import MAX_TOKEN_IDS, DetokenizeBody, TokenizeBody
from gateway.routes.requests import GuardedRoute
from gateway.state import Gateway, ThisGateway

router = APIRouter(
    route_class=GuardedRoute, tags=["tokens"], responses=answers(401, 403, 404, 415, 429)
)


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    prompt: str


class Version(BaseModel):
    version: str


@router.post("/tokenize")
async def tokenize(caller: Inference, gateway: ThisGateway, body: TokenizeBody) -> Tokens:
    """The tokens of a prompt, or of a chat as the model would be given it, of any length."""
    caller.check_template(body)
    card, tokenizer = await _model(gateway, body.model, caller.tenant)
    prompts, _ = await prompts_of(tokenizer, card, body, most=MAX_TOKEN_IDS)
    if len(prompts) > 1:
        raise invalid_value("prompt", "prompt: one at a time")
    names = tokenizer.names_of(prompts[0]) if body.return_token_strs else None
    return Tokens(
        count=len(prompts[0]),
        max_model_len=card.context_length,
        tokens=list(prompts[0]),
        token_strs=names,
    )


@router.post("/detokenize")
async def detokenize(caller: Inference, gateway: ThisGateway, body: DetokenizeBody) -> Detokenized:
    """The text of tokens, with that of special ones."""
    card, tokenizer = await _model(gateway, body.model, caller.tenant)
    check_ids("tokens", tuple(body.tokens), card)
    return Detokenized(prompt=tokenizer.decode(body.tokens))


@router.get("/version")
async def get_version(_: AnyCaller) -> Version:
    """The version of batchway."""
    return Version(version=version("batchway"))


async def _model(gateway: Gateway, name: str, tenant: str) -> tuple[ModelCard, ModelTokenizer]:
    """A model, the only one if none is named. Raises BatchwayError."""
    cards = {
        key: each for key, each in (await gateway.broker.known.models()).items() if not each.flow
    }
    name = (
        next(iter(cards))
        if not name and len(cards) == 1
        else await gateway.broker.known.named(name)
    )
    if name not in cards:
        raise await unknown_model_error(gateway.broker, name, tenant)
    return cards[name], await gateway.broker.known.tokenizer(cards[name])
