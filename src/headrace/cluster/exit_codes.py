"""The exit codes by which a worker process tells its supervisor why it ended."""

from __future__ import annotations

EXIT_USER_ERROR = 2
"""The user made a mistake, and the last line of the worker's log names it. A restart would not help."""
EXIT_LOST = 4
"""Something that the worker depends on is gone. It is nobody's mistake, and a restart may help."""
