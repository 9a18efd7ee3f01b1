"""How the ranks of an island share a model: meshes, FSDP2, TP, PP, CP, EP."""
