"""Retains the cached prefixes of sessions while their tools run: their next prompts begin with
them. Knows keys and times, never blocks."""

import math
from collections import Counter, defaultdict, deque
from dataclasses import dataclass

from workers.engine.sequence import Sequence
from workers.lanes import WARM

_LEAST_S, _MOST_S = 1.0, 600.0  # of a retention; longer pauses teach nothing
_FIRST_S = 20.0  # the pause that is expected of a tenant before its first
_NUM_LEARNT = 64  # of a tenant's last pauses
_QUANTILE, _MARGIN = 0.9, 1.5  # of them; the next may be longer
_MAX_NUM = 512  # pauses, ended sequences, tenants
_NUM_OPENING = 8  # of a prompt: some templates open an answer with tokens that later prompts lack
_NUM_COMPARED = 64  # of a prompt, before these


@dataclass(slots=True, eq=False)
class _Pause:
    """From the end of an answer until its session goes on."""

    tenant: str
    compared: slice  # of its prompt
    compared_ids: list[int]
    keys: list[bytes]  # that it retains
    begun_s: float
    expires_s: float = math.inf


class Retention:
    """The retained keys, of at most half of the blocks: beyond it the tenant with most loses those
    of its first pause. How long is learnt from each tenant's pauses, also where blocks had gone."""

    def __init__(self, num_blocks: int) -> None:
        self._most = num_blocks // 2  # prefixes of new sessions need the others
        self._now_s = 0.0
        # The supervisor tells which of them had called a tool a step after they have ended.
        self._ended: dict[tuple[str, int, int], _Pause] = {}
        self._pauses: dict[_Pause, None] = {}
        self.keys: Counter[bytes] = Counter()  # by how many pauses retain them
        self._num_keys: Counter[str] = Counter()  # by tenant
        self._lengths_s = defaultdict[str, deque[float]](lambda: deque((_FIRST_S,), _NUM_LEARNT))
        self.next_s: float | None = None  # when the next expires

    def note_end(self, sequence: Sequence) -> None:
        """Remembers a sequence that has ended."""
        end = max(0, sequence.num_prompt - _NUM_OPENING)
        compared, keys = slice(max(0, end - _NUM_COMPARED), end), sequence.block_keys[: self._most]
        self._ended[sequence.job_id, sequence.epoch, sequence.choice] = _Pause(
            sequence.tenant, compared, sequence.token_ids[compared], keys, self._now_s
        )
        if len(self._ended) > _MAX_NUM:
            del self._ended[next(iter(self._ended))]

    def begin(self, job_id: str, epoch: int, choice: int) -> list[bytes]:
        """Begins the pause of a choice that has ended. Returns the keys that it changes."""
        pause = self._ended.pop((job_id, epoch, choice), None)
        if pause is None:
            return []
        lengths_s = sorted(self._lengths_s[pause.tenant])
        if len(self._lengths_s) > _MAX_NUM:
            del self._lengths_s[next(iter(self._lengths_s))]
        expected_s = _MARGIN * lengths_s[int(_QUANTILE * len(lengths_s))]
        pause.expires_s = pause.begun_s + min(_MOST_S, max(_LEAST_S, expected_s))
        self.next_s = min(self.next_s or math.inf, pause.expires_s)
        changed = list(pause.keys)
        self._num_keys[pause.tenant] += sum(key not in self.keys for key in changed)
        self.keys.update(changed)
        self._pauses[pause] = None
        if len(self._pauses) > _MAX_NUM:
            changed += self._let_go(oldest := next(iter(self._pauses)))
            del self._pauses[oldest]
        while len(self.keys) > self._most:
            tenant = max(self._num_keys, key=self._num_keys.__getitem__)
            changed += self._let_go(next(p for p in self._pauses if p.tenant == tenant and p.keys))
        return changed

    def end(self, sequence: Sequence) -> list[bytes]:
        """Ends the pause after which a starting sequence goes on, if any. Returns keys let go."""
        for pause in reversed(self._pauses) if sequence.lane != WARM.name else ():
            num_prompt = pause.compared.stop + _NUM_OPENING
            is_longer = sequence.tenant == pause.tenant and sequence.num_prompt > num_prompt
            if is_longer and sequence.token_ids[pause.compared] == pause.compared_ids:
                del self._pauses[pause]
                if (length_s := self._now_s - pause.begun_s) <= _MOST_S:
                    self._lengths_s[pause.tenant].append(length_s)
                return self._let_go(pause)
        return []

    def expire(self, now_s: float) -> list[bytes]:
        """Sets the clock. Returns the keys let go, as their time has passed."""
        self._now_s = now_s
        if self.next_s is None or now_s < self.next_s:
            return []
        gone = [k for p in self._pauses if p.expires_s <= now_s for k in self._let_go(p)]
        self.next_s = min((p.expires_s for p in self._pauses if p.keys), default=None)
        return gone

    def _let_go(self, pause: _Pause) -> list[bytes]:
        """Returns the keys that no other pause retains."""
        self.keys.subtract(pause.keys)
        gone = [key for key in pause.keys if not self.keys[key]]
        for key in gone:
            del self.keys[key]
        self._num_keys -= Counter({pause.tenant: len(gone)})  # drops zeros
        pause.keys, pause.expires_s = [], math.inf
        return gone
