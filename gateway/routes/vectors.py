"""POST /v1/embeddings, /v1/rerank, /v1/score and /v1/classify: calls without streams. Cohere's and
other clients have further paths of the same call for a rerank."""

from fastapi import APIRouter
from starlette.responses import Response

from contract.jobs import Endpoint
from gateway.follow.answer_models import Classes, Embeddings, Ranking, Scores
from gateway.follow.job_objects import AcceptedJob
from gateway.http.handlers import answers
from gateway.prepare.vector_bodies import ClassifyBody, EmbeddingsBody, RerankBody, ScoreBody
from gateway.routes.requests import CallRoute
from gateway.routes.sync_calls import AskedOptions, answer_call

router = APIRouter(
    route_class=CallRoute,
    tags=["calls"],
    responses={
        202: {"model": AcceptedJob, "description": "Accepted as a job"},
        **answers(401, 403, 404, 409, 415, 429, 504),
    },
)


@router.post("/v1/embeddings", response_model=Embeddings)
async def create_embeddings(options: AskedOptions, body: EmbeddingsBody) -> Response:
    """Turns texts into vectors."""
    return await answer_call(options, Endpoint.EMBEDDINGS, body)


@router.post("/rerank", response_model=Ranking, include_in_schema=False)
@router.post("/v2/rerank", response_model=Ranking, include_in_schema=False)
@router.post("/v1/rerank", response_model=Ranking)
async def rerank(options: AskedOptions, body: RerankBody) -> Response:
    """Orders documents by their relevance to a query."""
    return await answer_call(options, Endpoint.RERANK, body)


@router.post("/v1/score", response_model=Scores)
async def score(options: AskedOptions, body: ScoreBody) -> Response:
    """Scores pairs of texts."""
    return await answer_call(options, Endpoint.SCORE, body)


@router.post("/v1/classify", response_model=Classes)
async def classify(options: AskedOptions, body: ClassifyBody) -> Response:
    """Gives each text a label."""
    return await answer_call(options, Endpoint.CLASSIFY, body)
