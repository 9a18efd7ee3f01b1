"""Text: where it comes from, and which tokens an island gets at which inner step.

Which island draws from which slot of the text is decided in `diloco.protocol.run.claims`.
"""
