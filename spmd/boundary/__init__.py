"""What moves when: the communication of a stack of layers, planned once from the mapping and the kinds of layers."""
