"""Files and batch jobs of OpenAI's Batch API, in the log."""
