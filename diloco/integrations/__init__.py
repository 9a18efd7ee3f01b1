"""DiLoCo beside other people's trainers; one module a trainer, imported by whoever has it."""
