"""Operations of layers, in plain torch: parts of `Operations`."""
