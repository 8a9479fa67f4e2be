"""What shardwright does to DTensor: its layouts, and its redistributes."""
