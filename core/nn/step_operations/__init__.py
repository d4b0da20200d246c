"""Operations of a step besides its layers, in plain torch: parts of `Operations`."""
