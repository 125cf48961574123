"""German sentences for the demo crawl."""

from pipeline.demo_crawl.speech import Speech

GERMAN = Speech(
    language="de",
    menu=("Startseite", "Artikel", "Termine", "Über uns", "Kontakt"),
    titles=("{ding}: ein Bericht", "Neues über {thema}", "Wie {person} {akk} fand", "Ein Abend über {thema}"),
    templates=(
        "{damals} hat {person} {ort} {akk} gefunden.",
        "{person} hat {damals} {akk} verkauft.",
        "{oft} sitzt {person} {ort} und liest.",
        "{ding} war {damals} {adj}.",
        "{person} suchte {ort} {akk}, {als}.",
        "Niemand wusste, warum {person} {damals} {akk} mitgebracht hatte.",
        "{ding} ist {oft} {adj}.",
        "Für {zahl} Euro bekommt man {ort} {akk}.",
        "Man erzählt sich, dass {person} {damals} {akk} verloren hat.",
        "{als}, blieb {person} {ort} stehen.",
        "Ob {ding} {adj} ist, weiß {person} am besten.",
        "Danach trug {person} {akk} nach Hause.",
        "Vielleicht findet {person} {ort} noch {akk}.",
        "Es dauerte {zahl} Stunden, bis {person} {akk} wiederfand.",
        "Seit {zahl} Jahren kauft {person} {ort} {akk}.",
        "{ort} wartete {person} auf besseres Wetter.",
        "Leider war {ding} {damals} {adj}.",
        "Mit {zahl} Freunden besuchte {person} {damals} eine Ausstellung über {thema}.",
        "Über {thema} spricht {person} {oft} sehr gern.",
        "Wenn {ding} {adj} ist, bleibt {person} lieber zu Hause.",
        "{person} meinte, {ding} sei {adj}.",
        "Ein Vortrag über {thema} fand {damals} {ort} statt.",
        "Kaum hatte {person} {akk} eingepackt, begann es zu regnen.",
        "{oft} öffnet {person} das Fenster und hört den Vögeln zu.",
        "Trotz allem brachte {person} {damals} {akk} mit.",
        "Wer etwas über {thema} lernen will, geht {oft} in die Bibliothek.",
        "{ort} hängt seit {zahl} Wochen ein Plakat über {thema}.",
        "Zum Glück hatte {person} {akk} dabei, {als}.",
        "Am Ende waren alle zufrieden, denn {ding} war {adj}.",
        "{person} zeigte den Kindern {ort} {akk}.",
        "Früher gab es {ort} {zahl} Läden, heute ist {ding} {adj}.",
        "Warum {person} {oft} {ort} steht, bleibt ein Rätsel.",
        "In der Zeitung stand {damals} ein Artikel über {thema}.",
        "{als}, fand {person} endlich {akk}.",
        "Nur {person} glaubte, dass {ding} {adj} sei.",
        "Nach {zahl} Minuten kam {person} zurück und holte {akk}.",
        "{damals} traf {person} {ort} einen alten Freund.",
        "Das Gespräch drehte sich {damals} um {thema}.",
        "Ohne {akk} verlässt {person} {oft} nicht das Haus.",
        "Schon {damals} wollte {person} mehr über {thema} wissen.",
    ),
    phrases={
        "damals": (
            "gestern / vor drei Wochen / im letzten Sommer / am vergangenen Freitag / an einem nebligen Morgen / "
            "kurz vor Weihnachten / gegen Mitternacht / nach dem Gewitter / vor vielen Jahren / am ersten Schultag"
        ),
        "oft": (
            "jeden Morgen / am Wochenende / im Herbst / abends / bei schönem Wetter / manchmal / gewöhnlich / "
            "an Feiertagen / im Winter / nach der Arbeit"
        ),
        "person": (
            "der Bäcker aus dem Nachbardorf / meine Großmutter / ein alter Fischer / die junge Lehrerin / "
            "unser Nachbar / eine Gärtnerin / der Schaffner / ein Student aus Leipzig / die Bürgermeisterin / "
            "mein Bruder / der Uhrmacher / eine Reisende aus Wien / die Bibliothekarin / der Müller / "
            "ein freundlicher Postbote / die Wirtin vom Goldenen Hirsch"
        ),
        "akk": (
            "einen Korb voller Äpfel / das alte Fahrrad / eine Kanne Tee / den Schlüssel zum Keller / "
            "einen langen Brief / die Karte der Umgebung / frisches Brot / ein Buch über Vögel / "
            "eine Schachtel mit Fotos / warme Handschuhe / die Zeitung von gestern / einen Strauß Tulpen / "
            "das Rezept für Pflaumenkuchen / eine neue Lampe / einen grünen Regenschirm / zwei Gläser Honig"
        ),
        "ort": (
            "auf dem Marktplatz / hinter der Kirche / am Ufer des Sees / in der kleinen Werkstatt / "
            "vor dem Rathaus / im Garten des Museums / neben der alten Mühle / an der Haltestelle / auf der Brücke / "
            "in einer Seitenstraße / unter den Linden / oben auf dem Hügel / am Hafen / in der Küche"
        ),
        "als": (
            "weil es stark regnete / obwohl der Laden schon geschlossen war / während draußen die Glocken läuteten / "
            "bevor die Gäste eintrafen / nachdem der Zug abgefahren war / als die Sonne endlich durchkam / "
            "da die Straße gesperrt war / weil das Licht ausgefallen war / als der Hund zu bellen begann"
        ),
        "adj": (
            "überraschend billig / viel zu laut / angenehm kühl / sehr alt / kaum zu erkennen / leicht beschädigt / "
            "besonders schön / ziemlich teuer / fast leer / gut besucht / schwer zu finden / etwas eigenartig"
        ),
        "ding": (
            "die alte Brücke / der neue Fahrplan / das kleine Café / die Ausstellung / der Weg zum See / "
            "das Wasser im Brunnen / die Suppe des Tages / der Blick vom Turm / das Konzert im Park / die Werkstatt"
        ),
        "thema": (
            "die Geschichte der Stadt / seltene Pflanzen / das Leben der Bienen / alte Landkarten / "
            "die Kunst des Backens / den Bau von Geigen / fremde Länder / die Sterne im Winter / gute Bücher / "
            "den Handel auf dem Fluss"
        ),
        "zahl": "zwei / drei / vier / fünf / sieben / acht / zehn / zwölf / zwanzig",
    },
)
