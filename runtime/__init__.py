"""Bundle -> tokens: engines, the loop, sampling parameters, measurement."""
