"""What a worker process says with its exit code to whoever watches over it."""

from __future__ import annotations

EXIT_USER_ERROR = 2
"""The user made a mistake, and the last line that the worker wrote says which: another start would not help."""
EXIT_LOST = 4
"""What the worker depends on is gone: nobody's mistake, and worth another start."""
