"""The Responses API: its bodies, how they become a conversation, its answers and events, and what is kept of them."""
