"""One reader for each tool: `TABLE` (names of fields), `recognises` (the tool's signature) and `read` (the run)."""
