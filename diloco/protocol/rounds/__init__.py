"""Rounds of one fragment: their states, their timing, and the messages between both sides."""
