"""Small modules in the ways that people write them, by family; each is planned and run, or refused with a sentence.

A public function of a family's file makes one: it returns the module and its example inputs, and its first line says what
it shows. `REFUSED` of the file holds, for those that no plan can hold, words of the sentence.
"""
