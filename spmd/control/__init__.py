"""How ranks agree: communicators, objects, signatures, stage-to-stage sends. MPI starts at first use."""
