"""The common base of the readers of calls. Each syntax has one (calls.py)."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from contract.output_formats import ToolFormat
from workers.output.growing_text import GrowingText, Reading
from workers.output.message import Message
from workers.output.patterns import compiled


class CallReader(ABC):
    """Reads the text between the marks of a call."""

    head: str  # a pattern of its beginning; by the format, unless the class has one

    def __init__(
        self,
        format_: ToolFormat,
        tools: Mapping[str, tuple[str, ...]],
        text: GrowingText,
        message: Message,
    ) -> None:
        self._text, self._message, self._tools = text, message, tools
        self._is_bare = format_.is_bare
        self._prepare(format_)
        self._head = compiled(self.head)

    def _prepare(self, format_: ToolFormat) -> None:  # noqa: B027 - most need no more
        """Sets attributes that depend on the format."""

    @abstractmethod
    def read(self) -> Reading[bool]:
        """Reads a call. False: there is none; the text is marked, unless a part was a call."""

    def _is_offered(self, name: str) -> bool:
        """Whether a call may have this name, the only sign of a call in a format without marks."""
        return not self._is_bare or name in self._tools
