"""Who runs where: launchers start worker processes and end them, supervision watches over them."""
