"""Pacing of payloads, and modelled links: rates, turns, delays, faults."""
