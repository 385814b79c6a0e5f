"""Chat templates come with models: what they can access, and their limits of output, time and
memory.
"""

import asyncio
import contextlib
import itertools
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from contract.keys import Keys
from gateway.child import Refused
from gateway.child_process import ChildLimits
from gateway.http.errors import ModelUnreadable, TemplateFailed, TemplateRefused
from gateway.models.chat_template import ChatTemplate, prepare
from gateway.models.tokens import TemplateProcess
from gateway.turns import Busy, Owner, work_for
from tests.fakes import hash_tokenizer
from tests.gateway.conftest import until_listed
from tests.gateway.fake_worker import MODEL, FakeWorker, publish_model

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hello"}]
LIMITS = ChildLimits(cpu_s=1, wall_s=60.0)  # the machine may be busy
HOSTILE = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of a function": "{{ raise_exception.__globals__.os }}",
    "globals of a filter": "{{ messages.append.__self__ }}{{ cycler.__init__.__globals__.os }}",
    "attributes by name": "{{ ''|attr('__class__')|attr('__base__') }}{{ 1 / 0 }}",
    "a change of the messages": "{{ messages.append(1) }}",
    "a change of a message": "{{ messages[0].update({'role': 'system'}) }}",
    "an import": "{% import 'os' as os %}",
    "a large range": "{% for i in range(10 ** 9) %}x{% endfor %}",
    "much output": "{% for i in range(90000) %}{{ messages[0].content }}{% for j in range(99) %}"
    "{{ messages[0].content }}{% endfor %}{% endfor %}",
    "a long text at once": "{{ 'x' * 10 ** 10 }}",
    "a long list at once": "{{ [0] * 10 ** 10 }}",
    "a long number": "{{ 10 ** 10 ** 10 }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a filter of something else": "{{ messages[0]|float|dictsort }}",
    "half a character": "{{ '\\ud800' }}",
}
# Rendering these ends the process.
GREEDY = {
    "a padded text": "{{ messages[0].content|center(10 ** 10) }}",
    "a padded constant": "{{ 'x'|center(10 ** 10) }}",
    "doubled texts": (
        "{% set ns = namespace(text=messages[0].content) %}{% for i in range(60) %}"
        "{% set ns.text = ns.text ~ ns.text %}{% endfor %}{{ ns.text|length }}"
    ),
}
ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)
UNREADABLE = {
    "a syntax error": "{% if %}",
    "deep nesting": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
}
# Over 0.1 s of processor time: ChildLimits.long_s twice.
SLOW = "{% for i in range(60) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
# By its message: `loop` takes all time, `fill` all memory, all else is repeated, `slow` slowly.
MOODY = (
    "{% set text = messages[0].content %}{% if text == 'slow' %}" + SLOW + "{% endif %}"
    "{% if text == 'loop' %}" + ENDLESS + "{% elif text == 'fill' %}"
    "{{ text|center(10 ** 10) }}{% else %}{{ text }}{% endif %}"
)


def says(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


Templates = Callable[..., TemplateProcess]


@pytest.fixture
async def templates() -> AsyncIterator[Templates]:
    """Creates template processes, and ends them."""
    made: list[TemplateProcess] = []

    def of(source: str, limits: ChildLimits = LIMITS) -> TemplateProcess:
        made.append(TemplateProcess("m", source, {}, limits))
        return made[-1]

    yield of
    for template in made:
        await template.aclose()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused(name: str) -> None:
    """It can neither access the process nor fill its memory."""
    with pytest.raises((Refused, UnicodeEncodeError)):
        ChatTemplate(HOSTILE[name], {}).render(MESSAGES).encode()


def test_templates_may_use_common_features() -> None:
    """Repeat a short text, calculate, format."""
    template = (
        "{{ '=' * 3 }}{{ 2 * 3 }}{{ 2 ** 3 }}{{ '%s:%d' % ('a', 7) }}{{ messages[0].content }}"
    )
    assert ChatTemplate(template, {}).render(MESSAGES) == "===68a:7hello"


def test_a_refusal_of_the_template_is_shortened() -> None:
    """The message to the caller is limited."""
    with pytest.raises(Refused) as refused:
        ChatTemplate("{{ raise_exception('x' * 5000) }}", {}).render(MESSAGES)
    assert len(str(refused.value)) < 300


_TURNS = st.lists(
    st.tuples(st.sampled_from(["system", "developer", "user", "assistant", "tool"]), st.booleans())
)
_SHOWN = (
    "[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
)
_STRICT = (
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('the first') }}{% endif %}"
    "{% if m.role == 'user' and not loop.first and loop.previtem.role == 'user' %}"
    "{{ raise_exception('in turn') }}{% endif %}"
)


@given(turns=_TURNS)
def test_strict_templates_get_all_that_was_said_in_their_order(
    turns: list[tuple[str, bool]],
) -> None:
    """Coding agents send several system messages, and several of a user, in a row. Other templates
    get the messages as they came."""

    def prompt(source: str) -> str:
        answer = prepare({"source": source, "tool_source": None, "special_tokens": {}})
        return answer({"messages": messages, "tools": None, "source": None})

    messages = [
        {"role": role, "content": [{"type": "text", "text": f"t{i} "}] if is_list else f"t{i} "}
        for i, (role, is_list) in enumerate(turns)
    ]
    each = "{% for m in messages %}" + _SHOWN
    as_sent = prompt(each + "{% endfor %}")
    strict = prompt(each + _STRICT + "{% endfor %}")
    assert re.findall(r"t\d+", strict) == [f"t{i}" for i in range(len(turns))]
    roles = ["system" if role == "developer" else role for role, _ in turns]
    assert re.findall(r"\[(\w+)\]", as_sent) == roles
    pairs = [*itertools.pairwise(roles)]
    is_taken = "system" not in roles[1:] and ("user", "user") not in pairs
    assert not is_taken or strict == as_sent


async def test_a_process_renders_one_request_after_another(templates: Templates) -> None:
    """One process; a refusal does not end it."""
    template = templates(
        "{{ bos }}{{ messages[0].content }}{% if messages[0].content == '7' %}"
        "{{ raise_exception('no sevens') }}{% endif %}"
    )

    texts = await asyncio.gather(
        *(template.render(says(str(i))) for i in range(20)), return_exceptions=True
    )

    refused = texts.pop(7)
    assert isinstance(refused, TemplateRefused)
    assert "no sevens" in str(refused)
    assert texts == [str(i) for i in range(20) if i != 7]


async def test_long_texts_come_whole(templates: Templates) -> None:
    """Longer than a socket's buffer, in both directions, with characters of every length."""
    text = "aß日😀" * 100_000
    template = templates("{{ messages[0].content }}")
    assert await template.render(says(text)) == text


@pytest.mark.parametrize("name", ["half a character", "a filter of something else", *GREEDY])
async def test_a_template_over_its_limits_fails_only_its_request(
    templates: Templates, name: str
) -> None:
    """What ends the process and what the sandbox forbids are told apart."""
    error, reason = (
        (TemplateFailed, "too much memory") if name in GREEDY else (TemplateRefused, None)
    )
    with pytest.raises(error, match=reason):
        await templates((HOSTILE | GREEDY)[name]).render(MESSAGES)


@pytest.mark.campaign
async def test_a_spare_is_ready_before_a_process_is_killed(templates: Templates) -> None:
    """So the next request has a new process, whatever ended the one before."""
    template = templates(MOODY)
    assert await template.render(says("a")) == "a"
    first = template.pid
    with pytest.raises(TemplateFailed, match="too much memory"):
        await template.render(says("fill"))
    assert await template.render(says("b")) == "b"
    second = template.pid
    failing = asyncio.create_task(template.render(says("loop")))
    while template.pid in (None, second):
        assert not failing.done()
        await asyncio.sleep(0.01)
    spare = template.pid
    with pytest.raises(TemplateFailed, match="too long"):
        await failing
    assert spare is not None
    assert len({first, second, spare}) == 3
    os.kill(spare, 0)  # it lives on
    assert await template.render(says("c")) == "c"


async def test_a_process_that_gets_no_processor_time_does_not_give_way(
    templates: Templates,
) -> None:
    """All requests of a busy machine take long by the clock; a process for each would be worse."""
    template = templates(MOODY, replace(LIMITS, long_s=0.01))
    for _ in range(3):
        pid = await stopped(template)
        first = asyncio.create_task(template.render(says("a")))
        await asyncio.sleep(0.1)  # ten times as long as a request may take of the processor
        os.kill(pid, signal.SIGCONT)
        assert await first == "a"
        assert template.pid == pid


async def test_what_nobody_waits_for_is_done_by_the_process_that_gave_way(
    templates: Templates,
) -> None:
    """So that a batch of slow lines does not start a process for each of them."""
    template = templates(MOODY)
    slow = await stopped(template)
    os.kill(slow, signal.SIGCONT)
    assert await template.render(says("slow")) == "slow"

    os.kill(slow, signal.SIGSTOP)
    assert await template.render(says("b")) == "b"
    work_for(Owner(is_attended=False))
    unattended = asyncio.create_task(template.render(says("c")))
    work_for(Owner())
    assert await template.render(says("d")) == "d"
    assert not unattended.done()
    os.kill(slow, signal.SIGCONT)
    assert await unattended == "c"


async def test_what_has_ended_two_processes_is_refused(templates: Templates) -> None:
    """For the same reason, without a third; other requests are rendered."""
    template = templates(MOODY)
    for _ in range(2):
        with pytest.raises(TemplateFailed, match="too much memory"):
            await template.render(says("fill"))
    assert await template.render(says("a")) == "a"
    pid = template.pid
    with pytest.raises(TemplateFailed, match="too much memory"):
        await template.render(says("fill"))
    assert template.pid == pid
    assert await template.render(says("b")) == "b"


async def test_a_process_that_cannot_start_is_no_fault_of_its_request(
    templates: Templates, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = templates(MOODY)
    with monkeypatch.context() as patch:
        patch.setattr("gateway.child_process.sys.executable", "/nowhere/python")
        for _ in range(2):
            with pytest.raises(TemplateFailed, match="cannot start"):
                await template.render(says("a"))
    assert await template.render(says("a")) == "a"


async def test_a_dead_process_is_replaced(templates: Templates) -> None:
    """If its end is known when the next request arrives."""
    template = templates("{{ messages[0].content }}")
    await template.render(MESSAGES)
    pid = template.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until_gone(pid)
    for _ in range(3):  # lets the event loop notice it
        await asyncio.sleep(0)
    assert await template.render(MESSAGES) == "hello"
    assert template.pid != pid


async def stopped(template: TemplateProcess) -> int:
    """A template's process that is stopped."""
    while template.pid is None:
        with contextlib.suppress(Busy):  # its start may take longer than its limit
            await template.render(MESSAGES)
    os.kill(template.pid, signal.SIGSTOP)
    return template.pid


async def test_a_template_that_hangs_is_killed_by_the_clock(templates: Templates) -> None:
    """A process that uses no CPU time never reaches its CPU limit. It gets none on a busy machine,
    which is not the fault of the request: it is not refused later."""
    template = templates(MOODY, replace(LIMITS, wall_s=0.8))
    for _ in range(3):
        pid = await stopped(template)
        with pytest.raises(Busy):
            await template.render(MESSAGES)
        await until_gone(pid)


async def test_the_wait_for_earlier_requests_is_limited(templates: Templates) -> None:
    """Then it gets 503 with Retry-After."""
    template = templates(MOODY)
    pid = await stopped(template)
    first = asyncio.create_task(template.render(says("a")))
    await asyncio.sleep(0)  # lets the task start
    work_for(Owner(), wait_s=0.01)
    with pytest.raises(Busy):
        await template.render(says("b"))
    os.kill(pid, signal.SIGCONT)
    assert await first == "a"


async def test_a_stuck_template_delays_no_other(templates: Templates) -> None:
    """Each model's template has its own process."""
    stuck, other = templates(MOODY), templates(MOODY)
    pid = await stopped(stuck)
    first = asyncio.create_task(stuck.render(says("a")))
    assert await other.render(says("b")) == "b"
    assert not first.done()
    os.kill(pid, signal.SIGCONT)
    assert await first == "a"


@pytest.mark.parametrize("name", UNREADABLE)
async def test_an_unreadable_template_is_tried_once(templates: Templates, name: str) -> None:
    """Compiling it is expensive, so it is not repeated."""
    template = templates(UNREADABLE[name])
    for _ in range(2):
        with pytest.raises(ModelUnreadable):
            await template.render(MESSAGES)
        assert template.pid is None


async def test_a_caller_that_is_cancelled_leaves_no_reply_to_the_next(templates: Templates) -> None:
    template = templates(MOODY)
    assert await template.render(says("a")) == "a"
    task = asyncio.create_task(template.render(says("b")))
    await asyncio.sleep(0)
    task.cancel()
    assert await template.render(says("c")) == "c"


async def test_a_closed_template_ends_its_process_after_its_current_request(
    templates: Templates,
) -> None:
    """Also if another template replaces it while a request uses it."""
    template = templates("{{ messages[0].content }}")
    pid = await stopped(template)
    first = asyncio.create_task(template.render(says("a")))
    await asyncio.sleep(0)  # lets the task start
    await template.aclose()
    os.kill(pid, signal.SIGCONT)
    assert await first == "a"
    assert (template.pid, is_running(pid)) == (None, False)
    assert await template.render(says("b")) == "b"
    assert template.pid is None


_KILLED_GATEWAY = """
import asyncio, os, signal
from gateway.child_process import ChildLimits
from gateway.models.tokens import TemplateProcess

async def main():
    idle, busy = [TemplateProcess("m", {source!r}, {{}}, ChildLimits(cpu_s=1)) for _ in range(2)]
    await asyncio.gather(*(t.render([{{"role": "user", "content": "a"}}]) for t in (idle, busy)))
    print(idle.pid, busy.pid, flush=True)
    task = asyncio.create_task(busy.render([{{"role": "user", "content": "loop"}}]))
    await asyncio.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_no_process_outlives_its_gateway() -> None:
    """Also if the gateway is killed while a template loops."""
    program = _KILLED_GATEWAY.format(source=MOODY)
    gateway = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=PIPE)
    pids, _ = await gateway.communicate()
    assert gateway.returncode == -signal.SIGKILL
    for pid in pids.split():
        await until_gone(int(pid))


async def until_gone(pid: int) -> None:
    """Returns once a process has ended; it may still be a zombie."""
    async with asyncio.timeout(30):
        while is_running(pid):  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before the open, or before the read
        return False


async def test_a_call_gets_the_error_of_its_template(
    redis_client: redis.asyncio.Redis, keys: Keys, http: httpx.AsyncClient, worker: FakeWorker
) -> None:
    """Calls before and after it are not affected, of this model or another."""
    source = MOODY + "{% if not messages[0].content %}{{ raise_exception('empty') }}{% endif %}"
    files = replace(hash_tokenizer(), chat_template=source)
    await publish_model(redis_client, keys, "moody", files=files)
    await FakeWorker(worker.functions, "moody", "w2").beat()
    await until_listed(http, {"moody"})

    async def ask(model: str, text: str) -> httpx.Response:
        body = {"model": model, "messages": says(text)}
        return await http.post("/v1/chat/completions", json=body)

    for word, status, code in (("fill", 500, "template_failed"), ("", 400, "invalid_value")):
        failed, other = await asyncio.gather(ask("moody", word), ask(MODEL, "Hi"))
        assert (failed.status_code, failed.json()["error"]["code"]) == (status, code)
        assert other.status_code == 200
