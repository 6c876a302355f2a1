"""Documentation; `generate` writes its tables from the code."""
