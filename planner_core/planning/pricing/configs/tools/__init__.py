"""One reader for each tool: `NAME`, the signature by which a file is known as the tool's own, and `setup`, which reads it."""
