"""The memory: readers of run directories. Nothing here runs inside the trainer."""
