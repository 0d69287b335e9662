"""The Messages API: its bodies, how they become a conversation, and its answers and events."""
