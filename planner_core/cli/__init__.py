"""The command line: one function a command, nothing decided here."""
