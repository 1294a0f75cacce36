"""Texts in a CSV file, and a fine-tuned transformer in a folder: from the file to a report."""

from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ifcomp import IFComp

model, tokenizer = AutoModelForSequenceClassification.from_pretrained("bert"), AutoTokenizer.from_pretrained("bert")
texts = load_dataset("csv", data_files="texts.csv", split="train")
texts = texts.map(lambda rows: tokenizer(rows["text"], padding="max_length", max_length=16), batched=True)
ifc = IFComp(model.eval()).fit(texts)
audit = ifc.audit(texts)
audit.to_csv("audit.csv")
ifc.report("report.html", audit=audit)
print(audit)
