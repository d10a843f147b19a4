"""A 4-bit base spread over the cards of one box or kept in its memory: planned from headers, streamed in, saved without being gathered."""
