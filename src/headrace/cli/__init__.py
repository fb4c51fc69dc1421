"""The command line. Every command imports what it needs when it is called, so `headrace --help` is instant."""
