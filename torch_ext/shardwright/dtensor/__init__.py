"""The integration with DTensor: its layouts and its redistributes."""
