"""What happens, in order: Prefect flows that read like a table of contents."""
