"""Update mathematics on lists of tensors: no ranks and no collectives in here."""
