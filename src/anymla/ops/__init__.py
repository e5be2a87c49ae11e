"""Operations: one folder a family, each with its contract, its mathematics and its backends."""
