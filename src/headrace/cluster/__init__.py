"""Which process runs where: launchers start and end worker processes, supervision watches over them."""
