"""`headrace bench`: measurements, side by side, in one call."""
import typer
def register(app: typer.Typer) -> None:
    """Add the command."""
