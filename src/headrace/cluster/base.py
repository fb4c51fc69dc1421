"""The interface through which the controller acts on its worker processes, and the exit codes of workers."""

EXIT_USER_ERROR = 2
"""The user made a mistake, and the last line of the worker's log names it. A restart would not help."""
KEY_LINE = "headrace worker key: "
"""The beginning of the first line that a worker with a `server_key` prints. Its public key follows."""


class Processes:
    """The controller's handle on its worker processes. It hears of their deaths and restarts from the queue of events.

    This base class does nothing: it is for runs whose engines and trainer live in the controller's own process.
    `supervision.Fleet` handles real processes.
    """

    def kill(self, name: str) -> None:
        """End a worker that no longer works. It is then started again, like a worker that died."""

    def rejoined(self, name: str) -> None:
        """Report that a restarted worker does its work again, so that its restart counts as complete."""
