"""Networks whose neurons sit on a grid and read a few neurons of the layer below (GeoSparse)."""
