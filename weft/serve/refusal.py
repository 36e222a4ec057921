"""The one exception that becomes an answer: a status, one line, and what the client may do about it."""


class Refusal(Exception):
    """A request that gets no answer, told in one line without paths or tracebacks."""

    def __init__(self, status: int, line: str, retry_after: int = 0) -> None:
        super().__init__(line)
        self.status, self.line, self.retry_after = status, line, retry_after
