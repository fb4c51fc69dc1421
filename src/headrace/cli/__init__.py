"""The command line. Every command imports what it needs when it is called: `headrace --help` is instant."""
